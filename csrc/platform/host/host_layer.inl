// Attention of a layer on the host, beside its shape.
FIELD(float, scale, 1.f)
FIELD(int64_t, window, 0)   // keys visible to a query, itself included; 0: all before it
FIELD(float, softcap, 0.f)  // 0: none
// Values of KVScales, copied: keys and values are Float8; null: they are in the dtype of heads.
FIELD(const float*, scales, nullptr)
