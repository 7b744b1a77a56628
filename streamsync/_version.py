"""The release, in the one place that packaging, metrics and the command line read."""

__version__ = "0.1.0"
