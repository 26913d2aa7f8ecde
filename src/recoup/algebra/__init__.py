"""Algebra: moments, selection and compensation on plain matrices. Nothing here knows what a network is."""
