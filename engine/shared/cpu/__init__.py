"""CPU placement of a node's processes: CPU lists, machine topology, planning, binding."""
