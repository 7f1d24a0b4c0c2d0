"""From a key to its graphs, and how long they live."""
