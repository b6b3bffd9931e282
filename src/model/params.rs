//! Named tensors in a fixed order: weights and gradients that drafters and the optimizer exchange.

use super::{ModelError, load::weight};
use crate::hf::HfError;
use crate::hf::draft::DraftConfig;
use crate::hf::head;
use crate::hf::layout::DraftFolder;
use crate::hf::tensors::TensorFiles;
use draftmill_actors::runtime::random::stream_seed;
use rand::RngExt;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use std::borrow::Borrow;
use tch::{Device, Kind, Tensor};

/// Tensors sorted by name. A set is moved between owners, never shared: its owner has the only alias of the storage and
/// may write in place.
///
/// The tensors of a *flat* set are views of one buffer, which is copied in one transfer and added in one operation.
/// Every copy of a set is flat. Write tensors in place and never replace one, which would leave the buffer stale.
pub struct ParamSet {
    names: Vec<String>,
    tensors: Vec<Tensor>,
    /// Buffer of a flat set; gaps between tensors are zero.
    buffer: Option<Tensor>,
}

/// Weights of a drafter.
pub type Weights = ParamSet;
/// Summed gradient of loss numerators, one tensor per weight.
pub type Gradient = ParamSet;

impl ParamSet {
    /// Sorts by name; names must be unique.
    pub fn new(mut pairs: Vec<(String, Tensor)>) -> ParamSet {
        pairs.sort_by(|a, b| a.0.cmp(&b.0));
        debug_assert!(pairs.windows(2).all(|pair| pair[0].0 < pair[1].0), "parameter names must differ");
        let (names, tensors) = pairs.into_iter().unzip();
        ParamSet { names, tensors, buffer: None }
    }

    pub fn len(&self) -> usize {
        self.names.len()
    }

    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Tensors in the order of [`ParamSet::names`].
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    pub fn tensors_mut(&mut self) -> &mut [Tensor] {
        &mut self.tensors
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.names.iter().map(String::as_str).zip(&self.tensors)
    }

    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.names.binary_search_by(|known| known.as_str().cmp(name)).ok().map(|index| &self.tensors[index])
    }

    /// Returns the tensor `name`.
    ///
    /// # Errors
    /// `ModelError::Input` if the set lacks it.
    pub fn need(&self, name: &str) -> Result<&Tensor, ModelError> {
        self.get(name).ok_or_else(|| ModelError::Input(format!("the drafter's weights lack `{name}`")))
    }

    /// Returns the tensor `name` for writing in place.
    ///
    /// # Errors
    /// `ModelError::Input` if the set lacks it.
    pub fn need_mut(&mut self, name: &str) -> Result<&mut Tensor, ModelError> {
        match self.names.binary_search_by(|known| known.as_str().cmp(name)) {
            Ok(index) => Ok(&mut self.tensors[index]),
            Err(_) => Err(ModelError::Input(format!("the drafter's weights lack `{name}`"))),
        }
    }

    pub fn into_pairs(self) -> Vec<(String, Tensor)> {
        self.names.into_iter().zip(self.tensors).collect()
    }

    /// Device of the whole set; `None` for an empty set.
    pub fn device(&self) -> Option<Device> {
        self.tensors.first().map(Tensor::device)
    }

    /// True if the set is one buffer.
    pub fn is_flat(&self) -> bool {
        self.buffer.is_some()
    }

    /// Returns a flat copy on `device` as `kind` that shares no storage with this set.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn deep_copy(&self, device: Device, kind: Kind) -> Result<ParamSet, ModelError> {
        let _no_grad = tch::no_grad_guard();
        let buffer = match &self.buffer {
            Some(buffer) => buffer.f_to_device_(device, kind, false, true)?,
            None => pack(&self.layout(), &self.tensors, kind)?.f_to_device_(device, kind, false, false)?,
        };
        self.with_buffer(buffer)
    }

    /// Returns a flat copy whose buffer `copy` makes, on any device.
    ///
    /// # Errors
    /// Returns the error of `copy`, or an error of libtorch.
    pub fn copy_with(&self, copy: impl FnOnce(&Tensor) -> Result<Tensor, ModelError>) -> Result<ParamSet, ModelError> {
        if self.is_empty() {
            return Ok(ParamSet::new(Vec::new()));
        }
        let _no_grad = tch::no_grad_guard();
        self.with_buffer(copy(&self.buffer()?)?)
    }

    /// All values as one read-only buffer: the own buffer of a flat set, else a copy.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn buffer(&self) -> Result<Tensor, ModelError> {
        let _no_grad = tch::no_grad_guard();
        match (&self.buffer, self.tensors.first()) {
            (Some(buffer), _) => Ok(buffer.shallow_clone()),
            (None, first) => pack(&self.layout(), &self.tensors, first.map_or(Ok(Kind::Float), Tensor::f_kind)?),
        }
    }

    /// Returns this set if it has dtype `kind`, else a flat copy in `kind`.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn into_kind(self, kind: Kind) -> Result<ParamSet, ModelError> {
        if self.tensors.iter().all(|tensor| tensor.kind() == kind) {
            return Ok(self);
        }
        let _no_grad = tch::no_grad_guard();
        let (layout, sizes) = (self.layout(), self.tensors.iter().map(Tensor::size).collect::<Vec<_>>());
        let ParamSet { names, tensors, .. } = self;
        // Each old tensor is freed as soon as it is copied.
        let buffer = pack(&layout, tensors, kind)?;
        let tensors = views(&buffer, &layout, sizes.iter().map(Vec::as_slice))?;
        Ok(ParamSet { names, tensors, buffer: Some(buffer) })
    }

    /// Adds a set of the same names and shapes, in one operation if both are flat.
    ///
    /// # Errors
    /// Returns an error if libtorch fails.
    pub fn add_(&mut self, other: &ParamSet) -> Result<(), ModelError> {
        let _no_grad = tch::no_grad_guard();
        if let (Some(sum), Some(part)) = (&mut self.buffer, &other.buffer) {
            let _ = sum.f_add_(part)?;
            return Ok(());
        }
        for (sum, part) in self.tensors.iter_mut().zip(&other.tensors) {
            let _ = sum.f_add_(part)?;
        }
        Ok(())
    }

    /// Checksum modulo 2^64 over the bits of all values, each weighted by the odd number that follows from its index.
    ///
    /// Equal on every device, whatever the order of addition. Computed on the device; one number is copied to the host.
    /// Detects a changed bit and two exchanged values.
    ///
    /// # Errors
    /// `ModelError::Input` if a dtype has no checksum; otherwise if libtorch fails.
    pub fn checksum(&self) -> Result<u64, ModelError> {
        let _no_grad = tch::no_grad_guard();
        let (mut before, mut sum) = (0, None);
        for tensor in &self.tensors {
            let kind = tensor.f_kind()?;
            let bits = match kind.elt_size_in_bytes() {
                8 => Kind::Int64,
                4 => Kind::Int,
                2 => Kind::Int16,
                _ => return Err(ModelError::Input(format!("dtype {kind:?} has no checksum"))),
            };
            let (count, options) = (tensor.numel() as i64, (Kind::Int64, tensor.device()));
            let values = tensor.f_reshape([-1])?.f_view_dtype(bits)?;
            for from in (0..count).step_by(CHECKSUM_CHUNK as usize) {
                let length = CHECKSUM_CHUNK.min(count - from);
                let first = 2 * (before + from) + 1;
                let weights = Tensor::f_arange_start_step(first, first + 2 * length, 2, options)?;
                let weighted = values.f_narrow(0, from, length)?.f_to_kind(Kind::Int64)?.f_mul(&weights)?;
                let part = weighted.f_sum(Kind::Int64)?;
                sum = Some(match sum {
                    None => part,
                    Some(sum) => part.f_add(&sum)?,
                });
            }
            before += count;
        }
        Ok(sum.map(|sum| sum.f_int64_value(&[])).transpose()?.unwrap_or(0) as u64)
    }

    fn layout(&self) -> BufferLayout {
        BufferLayout::of(self.tensors.iter().map(|tensor| tensor.numel() as i64))
    }

    /// Returns a set with the names and shapes of this one and its values in `buffer`.
    ///
    /// # Errors
    /// Returns an error if the buffer is too short.
    pub fn with_buffer(&self, buffer: Tensor) -> Result<ParamSet, ModelError> {
        let sizes: Vec<_> = self.tensors.iter().map(Tensor::size).collect();
        let tensors = views(&buffer, &self.layout(), sizes.iter().map(Vec::as_slice))?;
        Ok(ParamSet { names: self.names.clone(), tensors, buffer: Some(buffer) })
    }

    /// Zeros of the same names and shapes, in fp32 on the same devices.
    ///
    /// # Errors
    /// Returns an error if libtorch cannot allocate them.
    pub fn zeros_like(&self) -> Result<ParamSet, ModelError> {
        let zeros = self.tensors.iter().map(|t| Tensor::f_zeros(t.size(), (Kind::Float, t.device())));
        Ok(ParamSet { names: self.names.clone(), tensors: zeros.collect::<Result<_, _>>()?, buffer: None })
    }
}

/// Alignment of each tensor in a buffer, in values, as for separate allocations (64 bytes on the CPU, 512 on CUDA).
/// Kernels therefore compute the same on flat sets.
const ALIGNMENT: i64 = 128;

/// Values per chunk of a checksum, which takes 24 bytes for each.
const CHECKSUM_CHUNK: i64 = 1 << 22;

/// Position of each tensor of a set in a buffer.
struct BufferLayout {
    /// First value and count of each tensor.
    spans: Vec<(i64, i64)>,
    total: i64,
}

impl BufferLayout {
    fn of(counts: impl Iterator<Item = i64>) -> BufferLayout {
        let mut total = 0;
        let mut span = |count: i64| {
            let start = total;
            total += (count + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
            (start, count)
        };
        BufferLayout { spans: counts.map(&mut span).collect(), total }
    }
}

/// Packs tensors into a buffer of `kind` on the device of the first one.
fn pack<T: Borrow<Tensor>>(
    layout: &BufferLayout,
    tensors: impl IntoIterator<Item = T>,
    kind: Kind,
) -> Result<Tensor, ModelError> {
    let mut tensors = tensors.into_iter().peekable();
    let device = tensors.peek().map_or(Device::Cpu, |tensor| tensor.borrow().device());
    let buffer = Tensor::f_empty([layout.total], (kind, device))?;
    let ends = layout.spans.iter().skip(1).map(|&(start, _)| start).chain([layout.total]);
    for ((tensor, &(start, count)), end) in tensors.zip(&layout.spans).zip(ends) {
        buffer.f_narrow(0, start, count)?.f_copy_(&tensor.borrow().f_reshape([-1])?)?;
        let gap = end - start - count;
        if gap > 0 {
            let _ = buffer.f_narrow(0, start + count, gap)?.f_zero_()?;
        }
    }
    Ok(buffer)
}

fn views<'a>(
    buffer: &Tensor,
    layout: &BufferLayout,
    sizes: impl Iterator<Item = &'a [i64]>,
) -> Result<Vec<Tensor>, ModelError> {
    let view = |(&(start, count), size): (&(i64, i64), &[i64])| Ok(buffer.f_narrow(0, start, count)?.f_view(size)?);
    layout.spans.iter().zip(sizes).map(view).collect()
}

/// Initial weights in fp32 on the CPU: N(0, 0.02) for matrices and ones for norms, as transformers initialises Qwen3, and
/// values of the draft head that leave the backbone's predictions as they are.
/// Depends on `config` and `seed` only: every tensor has its own random stream, so threads and order do not matter.
///
/// # Errors
/// Returns an error if libtorch fails.
pub fn init_params(config: &DraftConfig, seed: u64) -> Result<ParamSet, ModelError> {
    let mut pairs = Vec::new();
    for (stream, (name, shape)) in config.tensor_shapes().into_iter().enumerate() {
        let sizes: Vec<i64> = shape.iter().map(|&n| n as i64).collect();
        let values = if let Some(values) = head::initial_values(&name, &shape) {
            values
        } else if shape.len() == 1 {
            vec![1.0; shape[0]]
        } else {
            let mut rng = ChaCha8Rng::from_seed(stream_seed(seed, "weights", &[stream as u64]));
            normal(&mut rng, shape.iter().product(), 0.02)
        };
        pairs.push((name, Tensor::f_from_slice(&values)?.f_reshape(sizes)?));
    }
    Ok(ParamSet::new(pairs))
}

/// Loads the weights of a drafter folder in fp32 on the CPU: exactly the tensors of its configuration.
///
/// # Errors
/// Returns an error if a tensor is absent, unknown, or has another shape.
pub fn load_params(config: &DraftConfig, files: &TensorFiles) -> Result<ParamSet, ModelError> {
    let shapes = config.tensor_shapes();
    if let Some(name) = files.names().find(|name| !shapes.contains_key(*name)) {
        return Err(HfError::UnknownTensor { file: files.label().into(), name: name.into() }.into());
    }
    read_params(config, files)
}

/// Loads the weights of a drafter folder in either layout, in fp32 on the CPU.
///
/// # Errors
/// Returns an error if a tensor is absent or has another shape.
pub fn folder_params(folder: &DraftFolder) -> Result<ParamSet, ModelError> {
    read_params(&folder.config, &folder.files)
}

fn read_params(config: &DraftConfig, files: &TensorFiles) -> Result<ParamSet, ModelError> {
    let read = |(name, shape): (String, Vec<usize>)| -> Result<(String, Tensor), ModelError> {
        let tensor = weight(files, &name, &shape, Kind::Float, Device::Cpu)?;
        Ok((name, tensor))
    };
    Ok(ParamSet::new(config.tensor_shapes().into_iter().map(read).collect::<Result<_, _>>()?))
}

/// Normal values by the Box-Muller transform.
fn normal(rng: &mut ChaCha8Rng, count: usize, deviation: f64) -> Vec<f32> {
    let mut values = Vec::with_capacity(count + 1);
    while values.len() < count {
        let (u, v): (f64, f64) = (rng.random(), rng.random());
        // 1 - u is in (0, 1], so the logarithm is finite.
        let radius = deviation * (-2.0 * (1.0 - u).ln()).sqrt();
        let (sin, cos) = (std::f64::consts::TAU * v).sin_cos();
        values.push((radius * cos) as f32);
        values.push((radius * sin) as f32);
    }
    values.truncate(count);
    values
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hf::config::TargetConfig;
    use proptest::prelude::*;

    fn config() -> DraftConfig {
        let target = serde_json::json!({
            "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 9,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 128,
        });
        DraftConfig::for_target(&TargetConfig::from_json(&target).unwrap(), 2, vec![1, 3, 5], 4, 49)
    }

    #[test]
    fn initial_weights_depend_on_the_seed_and_match_published_std() {
        let config = config();
        let (one, again, other) = (init_params(&config, 3), init_params(&config, 3), init_params(&config, 4));
        let (one, again, other) = (one.unwrap(), again.unwrap(), other.unwrap());
        assert_eq!(one.names().to_vec(), config.tensor_shapes().into_keys().collect::<Vec<_>>());
        let mut seen: Vec<Tensor> = Vec::new();
        for ((name, x), (again, other)) in one.iter().zip(again.tensors().iter().zip(other.tensors())) {
            assert!(x.equal(again), "{name}");
            if x.dim() == 1 {
                assert!(x.equal(&x.ones_like()), "{name}");
                continue;
            }
            assert!(!x.equal(other), "{name}");
            assert!(seen.iter().all(|former| former.size() != x.size() || !former.equal(x)), "{name} repeats another");
            let (mean, deviation) = (x.mean(Kind::Double), x.std(true));
            let (mean, deviation) = (f64::try_from(mean).unwrap(), f64::try_from(deviation).unwrap());
            assert!(mean.abs() < 0.002 && (deviation - 0.02).abs() < 0.002, "{name}: {mean} {deviation}");
            seen.push(x.shallow_clone());
        }
    }

    #[test]
    fn deep_copy_shares_no_storage() {
        let one = init_params(&config(), 0).unwrap();
        let mut two = one.deep_copy(Device::Cpu, Kind::Float).unwrap();
        let _ = two.tensors_mut()[0].fill_(7.0);
        assert!(!one.tensors()[0].equal(&two.tensors()[0]));
        assert!(one.tensors()[1].equal(&two.tensors()[1]));
        assert!(one.get("norm.weight").is_some() && one.get("norm").is_none());
    }

    fn set(shapes: &[Vec<i64>], values: &[f32]) -> ParamSet {
        let mut from = 0;
        let mut tensor = |shape: &Vec<i64>| {
            let count: i64 = shape.iter().product();
            let part: Vec<f32> = (from..from + count).map(|i| values[i as usize % values.len()]).collect();
            from += count;
            Tensor::from_slice(&part).reshape(shape)
        };
        let named = shapes.iter().map(&mut tensor).enumerate();
        ParamSet::new(named.map(|(i, tensor)| (format!("p{i:02}"), tensor)).collect())
    }

    fn same(one: &ParamSet, two: &ParamSet) -> bool {
        one.names() == two.names() && one.tensors().iter().zip(two.tensors()).all(|(a, b)| a.equal(b))
    }

    proptest! {
        /// Flat or not, a set has the same values and sums and is written in the same way.
        #[test]
        fn flat_set_equals_the_plain_set(
            shapes in prop::collection::vec(prop::collection::vec(0i64..20, 0..3), 1..6),
            values in prop::collection::vec(-1.0f32..1.0, 1..50),
        ) {
            let plain = set(&shapes, &values);
            let flat = plain.deep_copy(Device::Cpu, Kind::Float).unwrap();
            prop_assert!(!plain.is_flat() && flat.is_flat() && same(&plain, &flat));
            prop_assert!(same(&flat, &flat.deep_copy(Device::Cpu, Kind::Float).unwrap()));
            for tensor in flat.tensors() {
                prop_assert!(tensor.is_contiguous() && (tensor.data_ptr() as usize).is_multiple_of(64));
            }
            // Every combination gives the sum of the single tensors.
            let want = set(&shapes, &values.iter().map(|value| value + value).collect::<Vec<_>>());
            for sum_is_flat in [false, true] {
                for part in [&plain, &flat] {
                    let mut sum = if sum_is_flat {
                        plain.deep_copy(Device::Cpu, Kind::Float).unwrap()
                    } else {
                        set(&shapes, &values)
                    };
                    sum.add_(part).unwrap();
                    prop_assert!(same(&sum, &want));
                }
            }
            // A written value reaches the buffer and no other tensor.
            let mut written = flat.deep_copy(Device::Cpu, Kind::Float).unwrap();
            let _ = written.tensors_mut()[0].fill_(7.0);
            let copy = written.copy_with(|buffer| Ok(buffer.copy())).unwrap();
            prop_assert!(copy.tensors()[0].eq(7.0).all().int64_value(&[]) == 1);
            prop_assert!(copy.tensors()[1..].iter().zip(&plain.tensors()[1..]).all(|(a, b)| a.equal(b)));
        }

        /// Matches the formula, flat or not; detects every changed bit and every pair of exchanged values.
        #[test]
        fn checksum_detects_bit_flips_and_swaps(
            shapes in prop::collection::vec(prop::collection::vec(1i64..9, 0..3), 1..6),
            bits in prop::collection::vec(any::<i32>(), 1..300), bit in 0u32..32, at: prop::sample::Index, other: prop::sample::Index,
        ) {
            let count: usize = shapes.iter().map(|shape| shape.iter().product::<i64>() as usize).sum();
            let bits: Vec<i32> = (0..count).map(|i| bits[i % bits.len()]).collect();
            // Built from bits, because a NaN may change when it passes through f32.
            let of = |bits: &[i32]| {
                let mut from = 0;
                let named = shapes.iter().enumerate().map(|(i, shape)| {
                    let part = &bits[from..from + shape.iter().product::<i64>() as usize];
                    from += part.len();
                    (format!("p{i}"), Tensor::from_slice(part).view_dtype(Kind::Float).reshape(shape))
                });
                ParamSet::new(named.collect())
            };
            let set = of(&bits);
            let sum = |bits: &[i32]| {
                let terms = (0u64..).zip(bits).map(|(i, &bits)| (2 * i + 1).wrapping_mul(i64::from(bits) as u64));
                terms.fold(0u64, u64::wrapping_add)
            };
            let want = set.checksum().unwrap();
            prop_assert_eq!(want, sum(&bits));
            prop_assert_eq!(set.deep_copy(Device::Cpu, Kind::Float).unwrap().checksum().unwrap(), want);
            let (at, other) = (at.index(count), other.index(count));
            let mut changed = bits.clone();
            changed[at] ^= 1 << bit;
            prop_assert_ne!(of(&changed).checksum().unwrap(), want);
            let mut swapped = bits.clone();
            swapped.swap(at, other);
            prop_assert_eq!(of(&swapped).checksum().unwrap() == want, bits[at] == bits[other]);
        }

        #[test]
        fn another_dtype_is_converted_into_one_buffer(values in prop::collection::vec(-1e3f32..1e3, 1..50)) {
            let shapes = [vec![3, 5], vec![7]];
            let plain = set(&shapes, &values);
            let half = plain.deep_copy(Device::Cpu, Kind::BFloat16).unwrap();
            let wide = half.deep_copy(Device::Cpu, Kind::BFloat16).unwrap().into_kind(Kind::Float).unwrap();
            prop_assert!(wide.is_flat());
            for (name, tensor) in wide.iter() {
                prop_assert!(tensor.equal(&plain.get(name).unwrap().to_kind(Kind::BFloat16).to_kind(Kind::Float)));
            }
            prop_assert!(!plain.into_kind(Kind::Float).unwrap().is_flat());
        }
    }
}
