"""Arrays of any framework, and the buffers that transports send and receive."""
