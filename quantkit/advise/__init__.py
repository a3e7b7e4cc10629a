"""From a device and a model to the format to serve it in."""
