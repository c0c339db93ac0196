// A step that has been committed. Times are nanoseconds of the loop's clock.
FIELD(int64_t, step, 0)
FIELD(int64_t, begun_ns, 0)      // schedule began
FIELD(int64_t, packed_ns, 0)     // schedule and pack were over, launch began
FIELD(int64_t, launched_ns, 0)   // launch returned
FIELD(int64_t, ready_ns, 0)      // the step thread saw that the device was done
FIELD(int64_t, committed_ns, 0)  // its results were taken in
FIELD(int64_t, rows, 0)
FIELD(int64_t, tokens, 0)
FIELD(int64_t, decode_rows, 0)
FIELD(int64_t, predicted_ns, 0)  // that it was expected to take; 0: nothing is known
