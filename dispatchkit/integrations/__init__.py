"""dispatchkit behind other front ends: ``torch_compile`` is a backend of ``torch.compile``."""
