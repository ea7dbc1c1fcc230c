"""What training loops of any framework need beside the gradients' engine."""
