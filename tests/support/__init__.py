"""What tests share: real members, runs, hosts and simulated worlds. Nothing here is a test."""
