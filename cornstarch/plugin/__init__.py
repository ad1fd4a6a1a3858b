"""The published import paths of the plugins; `cornstarch.api` has the code."""
