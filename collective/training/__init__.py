"""Parts of training loops that no framework provides, beside the engine for gradients."""
