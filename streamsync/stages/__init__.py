"""The five stages: convert, pin and send at a source; receive and load at a sink."""
