"""Data planes that carry frames from a source to a sink, all behind the interface of `base`."""
