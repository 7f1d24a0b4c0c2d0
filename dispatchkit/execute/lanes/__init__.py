"""Several streams behind one runner."""
