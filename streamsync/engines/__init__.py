"""Engines that generate with the weights: what they need, and how they are gated while it lands."""
