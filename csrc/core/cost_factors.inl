// The time that steps have taken in place of 1 while they ran: those of decode rows alone; and of others the attention of
// chunks, and the rest. Steps of decode rows alone that have host rows take both the first factor and the last: attention on
// the host beside them takes bandwidth.
FIELD(double, decode, 1.0)
FIELD(double, rest, 1.0)
FIELD(double, attention, 1.0)
FIELD(double, hybrid, 1.0)
