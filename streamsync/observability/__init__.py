"""What happened, told once as events: metrics and traces listen to them."""
