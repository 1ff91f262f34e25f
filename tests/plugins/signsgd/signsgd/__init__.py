"""signSGD with majority vote (arXiv:1810.05291), as a plug-in of DistBelief."""
