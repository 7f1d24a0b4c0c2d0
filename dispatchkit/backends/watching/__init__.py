"""What is watched while a step is warmed up or captured, on any device."""
