"""From settings to a communicator: this process's rank, the rendezvous and the transport."""
