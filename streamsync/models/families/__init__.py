"""One file per family of models: which tensors its checkpoint has and how they may be cut."""
