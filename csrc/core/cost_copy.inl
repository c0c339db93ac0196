// Time of a copy.
FIELD(double, call_ns, 0.0)
FIELD(double, byte_ns, 0.0)
