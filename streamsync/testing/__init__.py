"""Pieces for tests of programs that use streamsync; not imported by the rest of the package."""
