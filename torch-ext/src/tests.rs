//! Tests on the CPU: kernels against their formulas, rejected inputs, and error conversion.

use super::*;
use std::sync::atomic::{AtomicUsize, Ordering};
use tch::Kind;

const CPU: Device = Device::Cpu;
/// The norm that [`run`] passes is far below `max_norm`, unless a test sets another one.
const UPDATE: Update = Update {
    learning_rate: 1e-2,
    beta1: 0.9,
    beta2: 0.99,
    eps: 1e-8,
    weight_decay: 0.1,
    step: 3,
    denominator: 4.0,
    max_norm: 1e3,
};

fn values(seed: i64, size: &[i64]) -> Tensor {
    let count: i64 = size.iter().product();
    let ramp = Tensor::arange(count, (Kind::Double, CPU)) * 0.7310 + seed as f64;
    ramp.sin().to_kind(Kind::Float).reshape(size)
}

/// Masters, gradients, first and second moments of two parameters and an empty one.
fn lists() -> [Vec<Tensor>; 4] {
    let list = |seed: i64| vec![values(seed, &[33, 5]), values(seed + 1, &[7]), values(0, &[0, 4])];
    [list(1), list(11), list(21), list(31).into_iter().map(|t| t.abs()).collect()]
}

fn copies(lists: &[Vec<Tensor>; 4]) -> [Vec<Tensor>; 4] {
    [0, 1, 2, 3].map(|i| lists[i].iter().map(Tensor::copy).collect())
}

fn run(lists: &mut [Vec<Tensor>; 4], update: &Update) -> Result<(), Error> {
    run_with_norm(lists, &Tensor::from(1f64), update)
}

fn run_with_norm(lists: &mut [Vec<Tensor>; 4], norm: &Tensor, update: &Update) -> Result<(), Error> {
    let [masters, gradients, exp_avg, exp_avg_sq] = lists;
    fused_adamw(masters, gradients, exp_avg, exp_avg_sq, norm, update)
}

fn value(norm: Tensor) -> f64 {
    PendingScalar::start(&norm).value().unwrap()
}

fn gap(a: &Tensor, b: &Tensor) -> f64 {
    if a.numel() == 0 { 0.0 } else { (a - b).abs().max().double_value(&[]) }
}

#[test]
fn compiled_for_the_libtorch_version_of_tch() {
    assert_eq!(version(), "2.11.0");
}

#[test]
fn fused_adamw_matches_the_formula() {
    let mut lists = lists();
    // A gradient may have another memory order.
    lists[1][0] = values(11, &[5, 33]).transpose(0, 1);
    let before = copies(&lists).map(|list| list.into_iter().map(|t| t.to_kind(Kind::Double)).collect::<Vec<_>>());
    // Long enough to be clipped to a fifth.
    let norm = norm(&lists[1]).unwrap();
    let update = Update { max_norm: norm.double_value(&[]) / 20.0, ..UPDATE };
    run_with_norm(&mut lists, &norm, &update).unwrap();
    let divisor = update.divisor(norm.double_value(&[]));
    assert!((divisor - 20.0).abs() < 1e-4, "{divisor}");
    let Update { learning_rate: lr, beta1, beta2, eps, weight_decay, step, .. } = update;
    for i in 0..before[0].len() {
        let g = &before[1][i] / divisor;
        let m = &before[2][i] * beta1 + &g * (1.0 - beta1);
        let v = &before[3][i] * beta2 + &g * &g * (1.0 - beta2);
        let root = (&v / (1.0 - beta2.powi(step as i32))).sqrt() + eps;
        let want = &before[0][i] * (1.0 - lr * weight_decay) - &m / (1.0 - beta1.powi(step as i32)) / root * lr;
        for (got, want) in [(&lists[0][i], &want), (&lists[2][i], &m), (&lists[3][i], &v)] {
            assert!(gap(got, want) < 1e-6, "parameter {i}: {:e}", gap(got, want));
        }
        assert!(i == 2 || gap(&lists[0][i], &before[0][i]) > 1e-3, "parameter {i} did not move");
    }
}

/// The CPU kernel checks neither size nor stride: tensors that it would misread are rejected first.
#[test]
fn unsupported_tensors_are_rejected_unchanged() {
    type Spoil = fn(&mut [Vec<Tensor>; 4]);
    let spoilt: [(&str, Spoil); 7] = [
        ("master that is not f32", |lists| lists[0][1] = lists[0][1].to_kind(Kind::Double)),
        ("gradient that is not f32", |lists| lists[1][1] = lists[1][1].to_kind(Kind::BFloat16)),
        ("first moment that is not contiguous", |lists| lists[2][0] = values(2, &[5, 33]).transpose(0, 1)),
        ("second moment of another size", |lists| lists[3][1] = values(3, &[6])),
        ("gradient of another size", |lists| lists[1][1] = values(3, &[6])),
        ("gradient that is undefined", |lists| lists[1][1] = Tensor::new()),
        ("a gradient and two moments for each master", |lists| drop(lists[1].pop())),
    ];
    let rejected = |lists: &mut [Vec<Tensor>; 4], update: &Update, what: &str| {
        let before = copies(&[0, 1, 2, 3].map(|i| lists[i].iter().filter(|t| t.defined()).map(Tensor::copy).collect()));
        let Err(Error::Unsuitable(text)) = run(lists, update) else { panic!("{what}: accepted") };
        assert!(text.contains(what), "{text}");
        for (list, before) in lists.iter().zip(&before) {
            let same = list.iter().filter(|t| t.defined()).zip(before).all(|(now, before)| now.equal(before));
            assert!(same, "{what}: something was changed");
        }
    };
    for (what, spoil) in spoilt {
        let mut lists = lists();
        spoil(&mut lists);
        rejected(&mut lists, &UPDATE, what);
    }
    for denominator in [0.0, -1.0, f64::INFINITY, f64::NAN] {
        rejected(&mut lists(), &Update { denominator, ..UPDATE }, "a finite number above zero");
    }
    for norm in [Tensor::from(1f32), Tensor::from_slice(&[1f64]), Tensor::new()] {
        let refused = run_with_norm(&mut lists(), &norm, &UPDATE);
        assert!(matches!(refused, Err(Error::Unsuitable(_))), "{norm:?}");
    }
    run(&mut lists(), &UPDATE).unwrap();
    run(&mut [vec![], vec![], vec![], vec![]], &UPDATE).unwrap();
}

/// Only the device knows the norm at that time.
#[test]
fn update_with_an_inapplicable_norm_changes_nothing() {
    let unchanged = |norm: f64, update: &Update| {
        let (mut lists, before) = (lists(), lists());
        run_with_norm(&mut lists, &Tensor::from(norm), update).unwrap();
        [0, 2, 3].iter().all(|&i| lists[i].iter().zip(&before[i]).all(|(now, before)| now.equal(before)))
    };
    for norm in [f64::NAN, f64::INFINITY, 1e300, 1.0, 0.0] {
        let applicable = norm <= 1.0;
        assert_eq!((unchanged(norm, &UPDATE), UPDATE.is_applicable(norm)), (!applicable, applicable), "{norm}");
    }
    assert!(unchanged(1.0, &Update { denominator: 1e300, ..UPDATE }));
}

#[test]
fn norm_covers_all_values() {
    let [list, ..] = lists();
    let want = list.iter().map(|t| t.to_kind(Kind::Double).square().sum(Kind::Double).double_value(&[])).sum::<f64>();
    let got = value(norm(&list).unwrap());
    assert!((got / want.sqrt() - 1.0).abs() < 1e-6, "{got} {want}");
    assert_eq!(value(norm(&[]).unwrap()), 0.0);
    assert!(value(norm(&[list[0].shallow_clone(), Tensor::from(f32::NAN)]).unwrap()).is_nan());
    assert_eq!(value(norm(&[Tensor::from(f32::INFINITY)]).unwrap()), f64::INFINITY);
}

#[test]
fn only_a_gpu_reports_memory() {
    assert_eq!((memory(CPU), empty_cache(CPU)), (Ok(None), Ok(())));
    let none = Device::Cuda(4096);
    for answer in [memory(none).map(drop), empty_cache(none)] {
        let Err(Error::Unsuitable(text)) = answer else { panic!("unknown GPU: accepted") };
        assert!(text.contains("CUDA device"), "{text}");
    }
}

#[test]
fn switches_are_read_back() {
    let before = (tf32_allowed().unwrap(), attention().unwrap(), segments_expand().unwrap());
    for allow in [true, false] {
        allow_tf32(allow).unwrap();
        expand_segments(allow).unwrap();
        assert_eq!((tf32_allowed(), segments_expand()), (Ok(allow), Ok(allow)));
    }
    for kernel in 0..4 {
        let kernels = Attention { flash: kernel == 0, efficient: kernel == 1, math: kernel == 2, cudnn: kernel == 3 };
        set_attention(kernels).unwrap();
        assert_eq!(attention(), Ok(kernels));
    }
    allow_tf32(before.0).unwrap();
    set_attention(before.1).unwrap();
    expand_segments(before.2).unwrap();
}

#[test]
fn exceptions_become_errors() {
    // SAFETY: takes a number and throws inside.
    let thrown = |what| done(unsafe { ffi::draftmill_throw(what) }).unwrap_err();
    for what in [1, 3, 5] {
        assert!(matches!(thrown(what), Error::OutOfMemory(_)), "{what}: {:?}", thrown(what));
        assert!(thrown(what).to_string().starts_with("out of memory: "), "{}", thrown(what));
    }
    assert_eq!(thrown(2), Error::Failed("a mistake".into()));
    assert_eq!(thrown(4), Error::Failed("a shape".into()));
    assert!(thrown(0).to_string().contains("not a std::exception"), "{}", thrown(0));
    // The earlier error is cleared.
    assert_eq!(value(norm(&[]).unwrap()), 0.0);
}

#[test]
fn grad_mode_of_the_thread_is_unchanged() {
    let leaf = Tensor::ones([2], (Kind::Float, CPU)).set_requires_grad(true);
    let tracked = || (&leaf * 2.0).requires_grad();
    drop(norm(&[leaf.shallow_clone()]).unwrap());
    let mut broken = lists();
    broken[0][0] = broken[0][0].to_kind(Kind::Double);
    run(&mut broken, &UPDATE).unwrap_err();
    assert!(tracked());
    let _no_grad = tch::no_grad_guard();
    drop(norm(&[leaf.shallow_clone()]).unwrap());
    assert!(!tracked());
}

/// Each item runs once, on as many threads as an operation has; operations inside stay on the thread of their item.
#[test]
fn parallel_items_run_once_and_stay_on_their_threads() {
    tch::set_num_threads(2);
    // Each item waits for the other: on a single thread the second would never start.
    let begun = AtomicUsize::new(0);
    let met = parallel_map(2, |_| {
        begun.fetch_add(1, Ordering::SeqCst);
        (0..10_000).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(1));
            begun.load(Ordering::SeqCst) == 2
        })
    });
    assert_eq!(met, Ok(vec![true, true]));
    let x = values(3, &[300, 300]);
    let x = Shared(x);
    let sums = parallel_map(40, |number| {
        let Shared(x) = &x;
        (x.matmul(x) * number as f64).sum(Kind::Double).double_value(&[])
    });
    let sums = sums.unwrap();
    let once = x.0.matmul(&x.0).sum(Kind::Double).double_value(&[]);
    assert!(sums.iter().enumerate().all(|(i, sum)| (sum - once * i as f64).abs() < 1e-3 * once.abs() * (1 + i) as f64));
    assert_eq!(parallel_map(0, |number| number), Ok(Vec::new()));
}

struct Shared(Tensor);
// SAFETY: the test only reads it.
unsafe impl Sync for Shared {}

#[test]
fn panic_resumes_in_the_caller_after_the_other_items() {
    let done = AtomicUsize::new(0);
    let panicked = std::panic::catch_unwind(|| {
        parallel_map(5, |number| {
            assert_ne!(number, 3, "three");
            done.fetch_add(1, Ordering::Relaxed);
        })
    });
    assert!(panicked.is_err());
    assert_eq!(done.load(Ordering::Relaxed), 4);
    assert_eq!(parallel_map(3, |number| number).unwrap(), [0, 1, 2]);
}
