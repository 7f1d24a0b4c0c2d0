"""Watch the operations of a step during warmups and captures."""
