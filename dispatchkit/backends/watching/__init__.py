"""Watch the operations of a step during warmups and captures, on any device."""
