"""A language model is trained in some processes while another one generates from it."""
