//! KV cache of many sequences of different lengths, for batched decoding.
//!
//! A single buffer as wide as the longest sequence would waste memory and attention time. Each sequence is therefore
//! stored in a size class with others of similar length, and moves to the next class when it outgrows its own.

use crate::model::ModelError;
use crate::model::ops::additive_mask;
use tch::{Device, Kind, Tensor};

/// Capacity of the first size class, in tokens; each further class has twice as much.
const FIRST_CAPACITY: i64 = 64;

/// KV cache of a batch. Sequences are numbered from 0 without gaps.
pub struct BatchedKvCache {
    layers: usize,
    /// Number of key/value heads and their size.
    heads: (i64, i64),
    on: (Kind, Device),
    classes: Vec<SizeClass>,
    sequences: Vec<Sequence>,
}

/// Position of a sequence in the cache, and its length in tokens.
#[derive(Clone, Copy)]
struct Sequence {
    class: usize,
    row: usize,
    len: i64,
}

#[derive(Default)]
struct SizeClass {
    capacity: i64,
    /// Sequence in each used row.
    sequences: Vec<usize>,
    /// Keys and values of each layer, `[rows, kv_heads, capacity, head_dim]`; empty before the first write.
    buffers: Vec<(Tensor, Tensor)>,
}

/// Sequences of one size class in one forward, each of which gets one more token.
pub struct Group {
    class: usize,
    /// Sequence numbers, `[rows]`.
    pub sequences: Tensor,
    /// Row indices, and lengths before the new token, which are its position. `[rows]` each.
    rows: Tensor,
    lengths: Tensor,
    /// Length of the longest sequence, including the new token.
    longest: i64,
    /// `[rows, 1, 1, longest]`; `None` if all lengths are equal.
    pub mask: Option<Tensor>,
}

impl BatchedKvCache {
    /// Creates an empty cache with keys of `heads` (key/value heads, size of each) in each of `layers`.
    pub fn new(layers: usize, heads: (i64, i64), on: (Kind, Device)) -> BatchedKvCache {
        BatchedKvCache { layers, heads, on, classes: Vec::new(), sequences: Vec::new() }
    }

    /// Number of sequences.
    pub fn len(&self) -> usize {
        self.sequences.len()
    }

    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    /// Length of each sequence in tokens.
    pub fn lengths(&self) -> impl Iterator<Item = i64> {
        self.sequences.iter().map(|sequence| sequence.len)
    }

    /// Makes room for one more token per sequence and returns the groups. [`BatchedKvCache::commit`] commits the tokens
    /// that are written.
    ///
    /// # Errors
    /// Returns an error if libtorch cannot allocate the buffers.
    pub fn prepare_step(&mut self) -> Result<Vec<Group>, ModelError> {
        for number in 0..self.sequences.len() {
            let Sequence { class, len, .. } = self.sequences[number];
            if len == self.classes[class].capacity {
                self.move_to_class(number, len + 1)?;
            }
        }
        let used = self.classes.iter().enumerate().filter(|(_, class)| !class.sequences.is_empty());
        used.map(|(index, class)| self.group(index, class)).collect()
    }

    fn group(&self, index: usize, class: &SizeClass) -> Result<Group, ModelError> {
        let (kind, device) = self.on;
        let list = |values: Vec<i64>| Ok::<_, ModelError>(Tensor::f_from_slice(&values)?.f_to_device(device)?);
        let lens: Vec<i64> = class.sequences.iter().map(|&number| self.sequences[number].len).collect();
        let longest = 1 + lens.iter().copied().max().unwrap_or(0);
        let ragged = lens.iter().any(|&len| len + 1 != longest);
        let lengths = list(lens)?;
        let mask = if ragged {
            let allowed = Tensor::f_arange(longest, (Kind::Int64, device))?.f_le_tensor(&lengths.f_unsqueeze(1)?)?;
            Some(additive_mask(&allowed, kind)?.f_unsqueeze(1)?.f_unsqueeze(1)?)
        } else {
            None
        };
        Ok(Group {
            class: index,
            sequences: list(class.sequences.iter().map(|&number| number as i64).collect())?,
            rows: list((0..class.sequences.len() as i64).collect())?,
            lengths,
            longest,
            mask,
        })
    }

    /// Writes the keys and values of the new tokens, each `[rows, kv_heads, head_dim]`, after those of the group's
    /// sequences. Returns views of all keys and values, `[rows, kv_heads, longest, head_dim]`; the mask hides the
    /// unused ends.
    ///
    /// # Errors
    /// Returns an error if the layer does not exist or libtorch fails.
    pub fn write(
        &mut self,
        layer: usize,
        group: &Group,
        keys: &Tensor,
        values: &Tensor,
    ) -> Result<(Tensor, Tensor), ModelError> {
        let count = group.rows.size()[0];
        let (all_keys, all_values) = self.classes[group.class].layer(layer)?;
        let put = |buffer: &Tensor, x: &Tensor| -> Result<Tensor, ModelError> {
            let at = [Some(&group.rows), None, Some(&group.lengths)];
            let _ = buffer.shallow_clone().f_index_put_(&at, x, false)?;
            Ok(buffer.f_narrow(0, 0, count)?.f_narrow(2, 0, group.longest)?)
        };
        Ok((put(all_keys, keys)?, put(all_values, values)?))
    }

    /// Commits the token that was written to each of the first `count` sequences.
    pub fn commit(&mut self, count: usize) {
        self.sequences.iter_mut().take(count).for_each(|sequence| sequence.len += 1);
    }

    /// Adds a sequence of `len` tokens with the next number. [`BatchedKvCache::fill`] writes its keys and values.
    ///
    /// # Errors
    /// Returns an error if libtorch cannot allocate the buffers.
    pub fn add(&mut self, len: i64) -> Result<(), ModelError> {
        let class = self.class_for(len);
        let row = self.allocate_row(class, self.sequences.len())?;
        self.sequences.push(Sequence { class, row, len });
        Ok(())
    }

    /// Writes keys and values of a whole sequence, each `[len, kv_heads, head_dim]`.
    ///
    /// # Errors
    /// Returns an error if the layer does not exist or libtorch fails.
    pub fn fill(&mut self, layer: usize, number: usize, keys: &Tensor, values: &Tensor) -> Result<(), ModelError> {
        let Sequence { class, row, len } = self.sequences[number];
        let (all_keys, all_values) = self.classes[class].layer(layer)?;
        for (buffer, x) in [(all_keys, keys), (all_values, values)] {
            copy(&x.f_transpose(0, 1)?, &span(buffer, row, len)?)?;
        }
        Ok(())
    }

    /// Removes a sequence. The last sequence takes its number.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn remove(&mut self, number: usize) -> Result<(), ModelError> {
        self.release_row(number)?;
        let last = self.sequences.len() - 1;
        self.sequences.swap_remove(number);
        if number != last {
            let Sequence { class, row, .. } = self.sequences[number];
            self.classes[class].sequences[row] = number;
        }
        Ok(())
    }

    /// Moves a sequence to a class with capacity for `need` tokens.
    fn move_to_class(&mut self, number: usize, need: i64) -> Result<(), ModelError> {
        let Sequence { class: from, row: old, len } = self.sequences[number];
        let to = self.class_for(need);
        let row = self.allocate_row(to, number)?;
        for layer in 0..self.layers {
            let (old_keys, old_values) = self.classes[from].layer(layer)?;
            let (keys, values) = self.classes[to].layer(layer)?;
            copy(&span(old_keys, old, len)?, &span(keys, row, len)?)?;
            copy(&span(old_values, old, len)?, &span(values, row, len)?)?;
        }
        self.release_row(number)?;
        self.sequences[number] = Sequence { class: to, row, len };
        Ok(())
    }

    /// Frees the row of a sequence and moves the last row of its class there.
    fn release_row(&mut self, number: usize) -> Result<(), ModelError> {
        let Sequence { class, row, .. } = self.sequences[number];
        let last = self.classes[class].sequences.len() - 1;
        let mover = self.classes[class].sequences[last];
        if row != last {
            let len = self.sequences[mover].len;
            for (keys, values) in &self.classes[class].buffers {
                copy(&span(keys, last, len)?, &span(keys, row, len)?)?;
                copy(&span(values, last, len)?, &span(values, row, len)?)?;
            }
            self.sequences[mover].row = row;
        }
        self.classes[class].sequences.swap_remove(row);
        if self.classes[class].sequences.is_empty() {
            self.classes[class].buffers.clear();
        }
        Ok(())
    }

    /// Returns the next free row of a class. Doubles its buffers if all rows are used.
    fn allocate_row(&mut self, class: usize, number: usize) -> Result<usize, ModelError> {
        let ((heads, dim), on) = (self.heads, self.on);
        let class = &mut self.classes[class];
        let (row, have) = (class.sequences.len(), class.buffers.first().map_or(0, |(keys, _)| keys.size()[0]));
        if row as i64 == have {
            // Zeros, because values past a sequence's end are multiplied by a weight of 0, which would keep a NaN.
            let empty = || Ok::<_, ModelError>(Tensor::f_zeros([(2 * have).max(1), heads, class.capacity, dim], on)?);
            let mut larger = Vec::with_capacity(self.layers);
            for layer in 0..self.layers {
                let (keys, values) = (empty()?, empty()?);
                if let Some((old_keys, old_values)) = class.buffers.get(layer) {
                    copy(old_keys, &keys.f_narrow(0, 0, have)?)?;
                    copy(old_values, &values.f_narrow(0, 0, have)?)?;
                }
                larger.push((keys, values));
            }
            class.buffers = larger;
        }
        class.sequences.push(number);
        Ok(row)
    }

    /// Returns the first class with capacity for `need` tokens.
    fn class_for(&mut self, need: i64) -> usize {
        let mut index = 0;
        while FIRST_CAPACITY << index < need {
            index += 1;
        }
        for new in self.classes.len()..=index {
            self.classes.push(SizeClass { capacity: FIRST_CAPACITY << new, ..SizeClass::default() });
        }
        index
    }
}

impl SizeClass {
    fn layer(&self, layer: usize) -> Result<&(Tensor, Tensor), ModelError> {
        let missing = || ModelError::Input(format!("the cache has no layer {layer}"));
        self.buffers.get(layer).ok_or_else(missing)
    }
}

/// Tokens of one row, `[kv_heads, len, head_dim]`, as a view.
fn span(buffer: &Tensor, row: usize, len: i64) -> Result<Tensor, ModelError> {
    Ok(buffer.f_get(row as i64)?.f_narrow(1, 0, len)?)
}

fn copy(from: &Tensor, to: &Tensor) -> Result<(), ModelError> {
    Ok(to.shallow_clone().f_copy_(from)?)
}
