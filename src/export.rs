//! Drafters in the z-lab layout, and the strict checker of that layout.
