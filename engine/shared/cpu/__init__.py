"""Which CPUs the processes of a node run on: lists, what the machine has, the plan, binding."""
