"""Measurements, each beside the roof it could reach."""
