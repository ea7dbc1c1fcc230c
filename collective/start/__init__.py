"""Who am I, where do we meet, which transport: from settings to a communicator."""
