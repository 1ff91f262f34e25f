"""What the members of a `local_sgd` run do: replicas that train apart, and the outer step that brings them together."""
