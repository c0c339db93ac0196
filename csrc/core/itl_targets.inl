// The longest time of steps in which sequences decode.
FIELD(int64_t, ns, 0)                // of the priority classes that are not named; 0: as long as it takes
FIELD(ClassTargets, of_class, {})    // (priority, nanoseconds)
