"""Watch operations while a step is warmed up or captured, on any device."""
