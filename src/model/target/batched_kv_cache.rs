//! Keys and values of many sequences side by side, layer by layer: the cache of batched decoding.
//!
//! Sequences of one batch differ in length, and a rectangle as wide as the longest would be mostly air, in memory and in every
//! attention. So each stands on a *shelf* with others of its size, and moves to the next one when it has outgrown it.

use crate::model::ModelError;
use crate::model::ops::additive_mask;
use tch::{Device, Kind, Tensor};

/// Tokens for which the first shelf has room; each further one has twice as much as the one before.
const FIRST_ROOM: i64 = 64;

/// The cache of a batch. Sequences are numbered from 0 without gaps.
pub struct Shelves {
    layers: usize,
    /// Key/value heads and their size.
    heads: (i64, i64),
    on: (Kind, Device),
    shelves: Vec<Shelf>,
    sequences: Vec<Sequence>,
}

/// Where a sequence stands, and its tokens.
#[derive(Clone, Copy)]
struct Sequence {
    shelf: usize,
    place: usize,
    len: i64,
}

#[derive(Default)]
struct Shelf {
    room: i64,
    /// The sequence at each place that is taken.
    taken: Vec<usize>,
    /// Keys and values of each layer, `[places, kv_heads, room, head_dim]`; none before the first write.
    buffers: Vec<(Tensor, Tensor)>,
}

/// The sequences of one shelf in one forward, in which each gets one more token.
pub struct Group {
    shelf: usize,
    /// Their numbers, `[places]`.
    pub sequences: Tensor,
    /// Places `[places]`, and where the new token goes at each, `[places]`.
    places: Tensor,
    ends: Tensor,
    /// Tokens of the longest, the new one included.
    longest: i64,
    /// `[places, 1, 1, longest]`; none where all are equally long.
    pub mask: Option<Tensor>,
}

impl Shelves {
    /// Nothing yet, for keys of `heads` (key/value heads, size of each) in each of `layers`.
    pub fn new(layers: usize, heads: (i64, i64), on: (Kind, Device)) -> Shelves {
        Shelves { layers, heads, on, shelves: Vec::new(), sequences: Vec::new() }
    }

    /// Sequences that are held.
    pub fn len(&self) -> usize {
        self.sequences.len()
    }

    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }

    /// Tokens of each sequence.
    pub fn lengths(&self) -> impl Iterator<Item = i64> {
        self.sequences.iter().map(|sequence| sequence.len)
    }

    /// Makes room for one more token behind every sequence, and says how they stand. What is written counts once
    /// [`Shelves::grow`] is called.
    pub fn groups(&mut self) -> Result<Vec<Group>, ModelError> {
        for number in 0..self.sequences.len() {
            let Sequence { shelf, len, .. } = self.sequences[number];
            if len == self.shelves[shelf].room {
                self.carry(number, len + 1)?;
            }
        }
        let taken = self.shelves.iter().enumerate().filter(|(_, shelf)| !shelf.taken.is_empty());
        taken.map(|(index, shelf)| self.group(index, shelf)).collect()
    }

    fn group(&self, index: usize, shelf: &Shelf) -> Result<Group, ModelError> {
        let (kind, device) = self.on;
        let list = |values: Vec<i64>| Ok::<_, ModelError>(Tensor::f_from_slice(&values)?.f_to_device(device)?);
        let lens: Vec<i64> = shelf.taken.iter().map(|&number| self.sequences[number].len).collect();
        let longest = 1 + lens.iter().copied().max().unwrap_or(0);
        let ragged = lens.iter().any(|&len| len + 1 != longest);
        let ends = list(lens)?;
        let mask = if ragged {
            let allowed = Tensor::f_arange(longest, (Kind::Int64, device))?.f_le_tensor(&ends.f_unsqueeze(1)?)?;
            Some(additive_mask(&allowed, kind)?.f_unsqueeze(1)?.f_unsqueeze(1)?)
        } else {
            None
        };
        Ok(Group {
            shelf: index,
            sequences: list(shelf.taken.iter().map(|&number| number as i64).collect())?,
            places: list((0..shelf.taken.len() as i64).collect())?,
            ends,
            longest,
            mask,
        })
    }

    /// Writes the new token's keys and values, each `[places, kv_heads, head_dim]`, behind those of the group's sequences.
    /// Gives both with all earlier ones, `[places, kv_heads, longest, head_dim]`: views, whose ends a mask has to hide.
    pub fn write(
        &mut self,
        layer: usize,
        group: &Group,
        keys: &Tensor,
        values: &Tensor,
    ) -> Result<(Tensor, Tensor), ModelError> {
        let count = group.places.size()[0];
        let (all_keys, all_values) = self.shelves[group.shelf].layer(layer)?;
        let put = |buffer: &Tensor, x: &Tensor| -> Result<Tensor, ModelError> {
            let at = [Some(&group.places), None, Some(&group.ends)];
            let _ = buffer.shallow_clone().f_index_put_(&at, x, false)?;
            Ok(buffer.f_narrow(0, 0, count)?.f_narrow(2, 0, group.longest)?)
        };
        Ok((put(all_keys, keys)?, put(all_values, values)?))
    }

    /// Commits the token that was written behind each of the first `count` sequences.
    pub fn grow(&mut self, count: usize) {
        self.sequences.iter_mut().take(count).for_each(|sequence| sequence.len += 1);
    }

    /// Takes in a sequence of `len` tokens, numbered behind the others. Its keys and values come by [`Shelves::fill`].
    pub fn add(&mut self, len: i64) -> Result<(), ModelError> {
        let shelf = self.shelf_for(len);
        let place = self.take(shelf, self.sequences.len())?;
        self.sequences.push(Sequence { shelf, place, len });
        Ok(())
    }

    /// Writes keys and values of a whole sequence, each `[len, kv_heads, head_dim]`.
    pub fn fill(&mut self, layer: usize, number: usize, keys: &Tensor, values: &Tensor) -> Result<(), ModelError> {
        let Sequence { shelf, place, len } = self.sequences[number];
        let (all_keys, all_values) = self.shelves[shelf].layer(layer)?;
        for (buffer, x) in [(all_keys, keys), (all_values, values)] {
            copy(&x.f_transpose(0, 1)?, &span(buffer, place, len)?)?;
        }
        Ok(())
    }

    /// Lets a sequence go. The last one takes its number.
    pub fn remove(&mut self, number: usize) -> Result<(), ModelError> {
        self.leave(number)?;
        let last = self.sequences.len() - 1;
        self.sequences.swap_remove(number);
        if number != last {
            let Sequence { shelf, place, .. } = self.sequences[number];
            self.shelves[shelf].taken[place] = number;
        }
        Ok(())
    }

    /// Moves a sequence to a shelf with room for `need` tokens.
    fn carry(&mut self, number: usize, need: i64) -> Result<(), ModelError> {
        let Sequence { shelf: from, place: old, len } = self.sequences[number];
        let to = self.shelf_for(need);
        let place = self.take(to, number)?;
        for layer in 0..self.layers {
            let (old_keys, old_values) = self.shelves[from].layer(layer)?;
            let (keys, values) = self.shelves[to].layer(layer)?;
            copy(&span(old_keys, old, len)?, &span(keys, place, len)?)?;
            copy(&span(old_values, old, len)?, &span(values, place, len)?)?;
        }
        self.leave(number)?;
        self.sequences[number] = Sequence { shelf: to, place, len };
        Ok(())
    }

    /// Clears a sequence's place. The last one of its shelf moves there.
    fn leave(&mut self, number: usize) -> Result<(), ModelError> {
        let Sequence { shelf, place, .. } = self.sequences[number];
        let last = self.shelves[shelf].taken.len() - 1;
        let mover = self.shelves[shelf].taken[last];
        if place != last {
            let len = self.sequences[mover].len;
            for (keys, values) in &self.shelves[shelf].buffers {
                copy(&span(keys, last, len)?, &span(keys, place, len)?)?;
                copy(&span(values, last, len)?, &span(values, place, len)?)?;
            }
            self.sequences[mover].place = place;
        }
        self.shelves[shelf].taken.swap_remove(place);
        if self.shelves[shelf].taken.is_empty() {
            self.shelves[shelf].buffers.clear();
        }
        Ok(())
    }

    /// The next free place of a shelf. Its buffers double when all are taken.
    fn take(&mut self, shelf: usize, number: usize) -> Result<usize, ModelError> {
        let ((heads, dim), on) = (self.heads, self.on);
        let shelf = &mut self.shelves[shelf];
        let (place, have) = (shelf.taken.len(), shelf.buffers.first().map_or(0, |(keys, _)| keys.size()[0]));
        if place as i64 == have {
            // Zeros, because what stands behind a sequence is multiplied by a weight of 0, which no NaN survives.
            let empty = || Ok::<_, ModelError>(Tensor::f_zeros([(2 * have).max(1), heads, shelf.room, dim], on)?);
            let mut larger = Vec::with_capacity(self.layers);
            for layer in 0..self.layers {
                let (keys, values) = (empty()?, empty()?);
                if let Some((old_keys, old_values)) = shelf.buffers.get(layer) {
                    copy(old_keys, &keys.f_narrow(0, 0, have)?)?;
                    copy(old_values, &values.f_narrow(0, 0, have)?)?;
                }
                larger.push((keys, values));
            }
            shelf.buffers = larger;
        }
        shelf.taken.push(number);
        Ok(place)
    }

    /// The first shelf with room for `need` tokens.
    fn shelf_for(&mut self, need: i64) -> usize {
        let mut index = 0;
        while FIRST_ROOM << index < need {
            index += 1;
        }
        for new in self.shelves.len()..=index {
            self.shelves.push(Shelf { room: FIRST_ROOM << new, ..Shelf::default() });
        }
        index
    }
}

impl Shelf {
    fn layer(&self, layer: usize) -> Result<&(Tensor, Tensor), ModelError> {
        let missing = || ModelError::Input(format!("the cache has no layer {layer}"));
        self.buffers.get(layer).ok_or_else(missing)
    }
}

/// The tokens of one place, `[kv_heads, len, head_dim]`, a view.
fn span(buffer: &Tensor, place: usize, len: i64) -> Result<Tensor, ModelError> {
    Ok(buffer.f_get(place as i64)?.f_narrow(1, 0, len)?)
}

fn copy(from: &Tensor, to: &Tensor) -> Result<(), ModelError> {
    Ok(to.shallow_clone().f_copy_(from)?)
}
