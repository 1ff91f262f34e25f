"""sandblaster: L-BFGS by a driver that sees scalars, vectors on servers, and the portions of all samples."""
