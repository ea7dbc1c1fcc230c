"""Arrays of any framework, and the buffers that transports move."""
