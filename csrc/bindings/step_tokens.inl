// A histogram of the tokens of each step.
FIELD(py::tuple, bounds, py::tuple())  // rising; a step of as many tokens as a bound counts below it
FIELD(py::tuple, counts, py::tuple())  // one more, of larger steps
FIELD(int64_t, total, 0)      // tokens of all steps
