//! Attention by libtorch's kernels, which store no scores, with the log-sum of each row. The log-sums merge attention
//! over several sets of keys, and the gradient of the merged attention needs them.

use crate::{Error, done, ffi, owned};
use std::{ffi::c_int, ptr};
use tch::{Device, Kind, Tensor};

/// Attention kernels of libtorch, with the numbers of `torch_ext.cpp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Kernel {
    Cpu = 0,
    Flash = 1,
    Efficient = 2,
}

impl Kernel {
    /// Kernel for heads of `head_dim` values. CUDA kernels load 16 bytes at a time, and the flash kernel supports at
    /// most 256 values.
    pub(crate) fn of(device: Device, kind: Kind, head_dim: i64) -> Option<Kernel> {
        let fits = head_dim % 8 == 0 && head_dim <= 256;
        match (device, kind) {
            (Device::Cpu, Kind::Float | Kind::BFloat16 | Kind::Half | Kind::Double) => Some(Kernel::Cpu),
            (Device::Cuda(_), Kind::BFloat16 | Kind::Half) if fits => Some(Kernel::Flash),
            (Device::Cuda(_), Kind::Float) if fits => Some(Kernel::Efficient),
            _ => None,
        }
    }

    fn for_queries(queries: &Tensor) -> Result<Kernel, Error> {
        let (device, head_dim) = (queries.device(), queries.size().last().copied().unwrap_or(0));
        let kind = queries.f_kind().map_err(|error| Error::Failed(error.to_string()))?;
        Kernel::of(device, kind, head_dim).ok_or_else(|| {
            Error::Unsuitable(format!("no attention kernel for {kind:?} with heads of {head_dim} on {device:?}"))
        })
    }
}

/// True if [`attend`] has a kernel for heads of `head_dim` values of `kind` on `device`.
pub fn has_kernel(device: Device, kind: Kind, head_dim: i64) -> bool {
    Kernel::of(device, kind, head_dim).is_some()
}

/// Attention output `[heads, queries, head_dim]`, and the log-sum of each query's weights, `[heads, queries]` in f32
/// (f64 for f64 inputs). A weight is `exp(scale * q . k)`.
///
/// `queries` are `[heads, queries, head_dim]`; `keys` and `values` are `[heads, keys, head_dim]`. Each is contiguous in
/// its last dimension, and none is empty.
///
/// # Errors
/// [`Error::Unsuitable`] for other inputs and if [`has_kernel`] is false; otherwise if libtorch fails.
pub fn attend(queries: &Tensor, keys: &Tensor, values: &Tensor, scale: f64) -> Result<(Tensor, Tensor), Error> {
    let kernel = Kernel::for_queries(queries)? as c_int;
    let mut out = [ptr::null_mut(); 2];
    // SAFETY: live tensors, borrowed for the call; C++ checks sizes, dtypes and devices; `out` has two entries.
    done(unsafe {
        ffi::draftmill_attend(kernel, queries.as_ptr(), keys.as_ptr(), values.as_ptr(), scale, out.as_mut_ptr())
    })?;
    Ok(out.map(owned).into())
}

/// Gradients of queries, keys and values from that of the output.
///
/// `gathered` and `log_sum` are the results of [`attend`], or those merged over more keys; the gradients are then those
/// of the merged attention with respect to these keys. The kernel recomputes its weights from `log_sum` and subtracts
/// `gathered . d_gathered` (FlashAttention, arXiv:2205.14135).
///
/// # Errors
/// [`Error::Unsuitable`] for inputs that do not match; otherwise if libtorch fails.
pub fn attend_backward(
    d_gathered: &Tensor,
    [queries, keys, values]: [&Tensor; 3],
    gathered: &Tensor,
    log_sum: &Tensor,
    scale: f64,
) -> Result<[Tensor; 3], Error> {
    let kernel = Kernel::for_queries(queries)? as c_int;
    let mut out = [ptr::null_mut(); 3];
    // SAFETY: as above; `out` has three entries.
    done(unsafe {
        ffi::draftmill_attend_backward(
            kernel,
            d_gathered.as_ptr(),
            queries.as_ptr(),
            keys.as_ptr(),
            values.as_ptr(),
            gathered.as_ptr(),
            log_sum.as_ptr(),
            scale,
            out.as_mut_ptr(),
        )
    })?;
    Ok(out.map(owned))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CPU: Device = Device::Cpu;
    const SCALE: f64 = 0.3;

    /// Queries, keys, values and a gradient of the output, for heads of `dim`.
    fn inputs([heads, queries, keys, dim]: [i64; 4], kind: Kind) -> [Tensor; 4] {
        let values = |seed: f64, len: i64| {
            let ramp = Tensor::arange(heads * len * dim, (Kind::Double, CPU)) * 0.7310 + seed;
            (ramp.sin() * 2.0).reshape([heads, len, dim]).to_kind(kind)
        };
        [values(1.0, queries), values(2.0, keys), values(3.0, keys), values(4.0, queries)]
    }

    /// Output, log-sum and the three gradients in f64, by the definition and autograd.
    fn reference([q, k, v, d_out]: &[Tensor; 4]) -> [Tensor; 5] {
        let leaf = |x: &Tensor| x.to_kind(Kind::Double).detach().set_requires_grad(true);
        let (q, k, v) = (leaf(q), leaf(k), leaf(v));
        let scores = q.bmm(&k.transpose(1, 2)) * SCALE;
        let out = scores.softmax(-1, Kind::Double).bmm(&v);
        let total = (&out * d_out.to_kind(Kind::Double)).sum(Kind::Double);
        let gradients = Tensor::run_backward(&[&total], &[&q, &k, &v], false, false);
        let [dq, dk, dv] = <[Tensor; 3]>::try_from(gradients).unwrap();
        [out.detach(), scores.logsumexp([-1i64].as_slice(), false).detach(), dq, dk, dv]
    }

    fn close(what: &str, got: &Tensor, want: &Tensor, limit: f64) {
        assert_eq!(got.size(), want.size(), "{what}");
        let gap = (got.to_kind(Kind::Double) - want).abs().max().double_value(&[]);
        let largest = want.abs().max().double_value(&[]).max(1.0);
        assert!(gap <= limit * largest, "{what} is off by {gap:e} of {largest}");
    }

    const LIMITS: [(Kind, f64); 4] =
        [(Kind::Double, 1e-12), (Kind::Float, 3e-5), (Kind::BFloat16, 2e-2), (Kind::Half, 3e-3)];
    const SHAPES: [[i64; 4]; 5] = [[1, 1, 1, 8], [3, 5, 40, 16], [2, 300, 1, 8], [2, 70, 600, 64], [4, 33, 7, 20]];

    #[test]
    fn kernels_match_the_definition() {
        for ((kind, limit), shape) in LIMITS.iter().flat_map(|limit| SHAPES.iter().map(move |shape| (limit, shape))) {
            let inputs = inputs(*shape, *kind);
            let [q, k, v, d_out] = &inputs;
            let (out, log_sum) = attend(q, k, v, SCALE).unwrap();
            let wide = if *kind == Kind::Double { Kind::Double } else { Kind::Float };
            assert_eq!((out.kind(), log_sum.kind()), (*kind, wide));
            let [d_q, d_k, d_v] = attend_backward(d_out, [q, k, v], &out, &log_sum, SCALE).unwrap();
            let got = [&out, &log_sum, &d_q, &d_k, &d_v];
            for ((name, got), want) in ["out", "sum", "d q", "d k", "d v"].iter().zip(got).zip(&reference(&inputs)) {
                close(&format!("{name} of {shape:?} in {kind:?}"), got, want, *limit);
            }
        }
    }

    /// Keys in two spans, merged by their log-sums. The backward of each span with the merged output gives the exact
    /// gradients; the backward with its own output and log-sum, which autograd through the merge amounts to, does not.
    #[test]
    fn gradients_of_merged_attention_are_exact() {
        for (kind, limit) in [(Kind::Double, 1e-12), (Kind::Float, 1e-5)] {
            let inputs = inputs([3, 40, 50, 16], kind);
            let [q, k, v, d_out] = &inputs;
            // Views into longer tensors, as for groups of a batch.
            let part = |x: &Tensor, second: bool| if second { x.narrow(1, 31, 19) } else { x.narrow(1, 0, 31) };
            let parts = [false, true].map(|second| (part(k, second), part(v, second)));
            let partial = parts.each_ref().map(|(k, v)| attend(q, k, v, SCALE).unwrap());
            let log_sum = Tensor::logaddexp(&partial[0].1, &partial[1].1);
            let out = partial.iter().map(|(out, own)| out * (own - &log_sum).exp().unsqueeze(-1)).sum::<Tensor>();
            let back = |own: bool| {
                let each = [0, 1].map(|i| {
                    let (k, v) = &parts[i];
                    let (out, log_sum) = if own { (&partial[i].0, &partial[i].1) } else { (&out, &log_sum) };
                    attend_backward(d_out, [q, k, v], out, log_sum, SCALE).unwrap()
                });
                let [[q_1, k_1, v_1], [q_2, k_2, v_2]] = each;
                [q_1 + q_2, Tensor::cat(&[k_1, k_2], 1), Tensor::cat(&[v_1, v_2], 1)]
            };
            let want = reference(&inputs);
            close("out", &out, &want[0], limit);
            for ((got, own), want) in back(false).iter().zip(&back(true)).zip(&want[2..]) {
                close("gradient", got, want, limit);
                assert!((own.to_kind(Kind::Double) - want).abs().max().double_value(&[]) > 0.01);
            }
        }
    }

    #[test]
    fn device_and_dtype_select_the_kernel() {
        let gpu = Device::Cuda(1);
        assert_eq!(Kernel::of(gpu, Kind::BFloat16, 64), Some(Kernel::Flash));
        assert_eq!(Kernel::of(gpu, Kind::Half, 256), Some(Kernel::Flash));
        assert_eq!(Kernel::of(gpu, Kind::Float, 128), Some(Kernel::Efficient));
        assert_eq!(Kernel::of(CPU, Kind::Float, 7), Some(Kernel::Cpu));
        let none = [(gpu, Kind::Double, 64), (gpu, Kind::BFloat16, 60), (gpu, Kind::Float, 264), (CPU, Kind::Int, 64)];
        for (device, kind, head_dim) in none {
            assert!(!has_kernel(device, kind, head_dim), "{kind:?} on {device:?}");
        }
    }

    /// The kernels do not check every dtype and size: inputs that they would misread are rejected first.
    #[test]
    fn unsupported_inputs_are_rejected() {
        type Spoil = fn(&mut [Tensor; 4]);
        let spoilt: [(&str, Spoil); 9] = [
            ("Int with heads of 8", |all| all[0] = all[0].to_kind(Kind::Int)),
            ("keys of another dtype", |all| all[1] = all[1].to_kind(Kind::BFloat16)),
            ("keys of another size", |all| all[1] = all[1].narrow(2, 0, 7)),
            ("keys of another size", |all| all[1] = all[1].narrow(0, 0, 1)),
            ("values of another size", |all| all[2] = all[2].narrow(1, 0, 3)),
            ("values that are not contiguous", |all| all[2] = all[2].transpose(1, 2).contiguous().transpose(1, 2)),
            ("undefined values", |all| all[2] = Tensor::new()),
            ("empty", |all| all[1] = all[1].narrow(1, 0, 0)),
            ("three dimensions", |all| all[0] = all[0].unsqueeze(0)),
        ];
        let refused = |answer: Result<(), Error>, what: &str| {
            let Err(Error::Unsuitable(text)) = answer else { panic!("{what}: accepted") };
            assert!(text.contains(what), "{text}");
        };
        for (what, spoil) in spoilt {
            let mut all = inputs([2, 5, 4, 8], Kind::Float);
            spoil(&mut all);
            let [q, k, v, d_out] = &all;
            refused(attend(q, k, v, SCALE).map(drop), what);
            let sums = Tensor::zeros([2, 5], (Kind::Float, CPU));
            refused(attend_backward(d_out, [q, k, v], d_out, &sums, SCALE).map(drop), what);
        }
        let [q, k, v, d_out] = &inputs([2, 5, 4, 8], Kind::Float);
        let sums = Tensor::zeros([2, 5], (Kind::Float, CPU));
        let back =
            |d_out: &Tensor, out: &Tensor, sums: &Tensor| attend_backward(d_out, [q, k, v], out, sums, SCALE).map(drop);
        back(d_out, d_out, &sums.transpose(0, 1).contiguous().transpose(0, 1)).unwrap();
        refused(back(&d_out.narrow(1, 0, 4), d_out, &sums), "gradients of another size");
        refused(back(d_out, &d_out.to_kind(Kind::Double), &sums), "outputs of another dtype");
        refused(back(d_out, d_out, &sums.to_kind(Kind::Double)), "log-sums of another dtype");
        refused(back(d_out, d_out, &sums.narrow(1, 0, 4)), "log-sums of another size");
    }
}
