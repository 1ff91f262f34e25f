"""Simulated parameter servers: real servers and clients, messages handed over one by one."""
