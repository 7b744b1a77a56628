"""Layouts: which boxes of which tensors a rank holds or needs, and where in its memory."""
