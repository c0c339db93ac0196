// A record that a step gives beside a token or a row.
FIELD(py::object, kind, py::object())  // RecordKind
// Place among the tokens of the token that it is of, or -1. Of logits of a token to come: their number.
FIELD(int32_t, token, -1)
FIELD(py::bytes, payload, py::bytes())  // 32-bit words
