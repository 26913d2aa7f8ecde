"""From a model and one batch to the structure that every later stage works on."""
