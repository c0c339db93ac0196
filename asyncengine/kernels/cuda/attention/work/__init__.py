"""Work lists: attention cut into even shares on the device."""
