"""What calibration sees at the inputs of layers, and the rankings of channels that follow from it."""
