"""What is changed and recorded while a runner serves."""
