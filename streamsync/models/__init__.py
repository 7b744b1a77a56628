"""Model families: how trainers keep the tensors of their checkpoints."""
