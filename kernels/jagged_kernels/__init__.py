"""Triton kernels of jagged-modules. Importing this package imports torch only; each kernel module
imports triton itself."""
