"""What a step costs in time and memory on this device."""
