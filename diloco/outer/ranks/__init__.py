"""A replica of several processes, which train one model together."""
