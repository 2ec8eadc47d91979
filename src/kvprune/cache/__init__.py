"""What is remembered between forward passes."""
