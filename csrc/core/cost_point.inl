// Time of steps of so many tokens. Between two points time is linear.
FIELD(int32_t, tokens, 0)
FIELD(double, base_ns, 0.0)     // with no context
FIELD(double, context_ns, 0.0)  // more for each token of context: of all decode rows together, or of the chunk of a prompt
