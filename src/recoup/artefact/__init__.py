"""Saving and loading a result: JSON under a schema, safetensors, a report. No pickle, nothing half written.

manifest.json         what every file must be: sizes and hashes, versions, the class, tensors, modes, how to check
plan.json             what was kept of every parameter and buffer, and what the original looked like
graph.json            what a standalone result runs; a result of the model's own class has none
model.safetensors     the smaller model's parameters and buffers
samples.safetensors   a few inputs and what the saved model made of them
report.json, report.html
"""
